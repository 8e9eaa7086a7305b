"""The team's dashboard: pages for people beside the API for programs, from the same process and data."""
