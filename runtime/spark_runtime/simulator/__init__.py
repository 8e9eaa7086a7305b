"""Caches of experts replayed over local traces or judged from counts: no model, no device. Pure: numpy alone."""
