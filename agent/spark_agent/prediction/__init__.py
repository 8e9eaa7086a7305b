"""Predictors learned from local traces: what they are learned from, and the files they are kept in."""
