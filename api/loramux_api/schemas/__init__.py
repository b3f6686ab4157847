"""What crosses the wire, as msgspec structs, and its way to and from the gateway's own types."""
