"""The C++ twins of the operators, and what compiles, loads and calls them."""
