"""Other tools' files: routing counts and rankings in, placements and counts out."""
