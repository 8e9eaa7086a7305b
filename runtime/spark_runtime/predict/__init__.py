"""Which experts a layer will select, said before its router runs, from earlier selections alone."""
