"""The native part: C++ sources, built on first use on the machine that runs them."""
