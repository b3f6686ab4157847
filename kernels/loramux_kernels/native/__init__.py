"""The operators in C++, and the Python that compiles, loads and calls them."""
