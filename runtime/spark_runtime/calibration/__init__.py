"""From sessions' counts to frequencies and to what placements miss: for the service and for an agent alone. Pure."""
