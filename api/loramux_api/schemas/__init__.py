"""Bodies and answers of the API as msgspec structs, converted from and to the serving layer's own types."""
