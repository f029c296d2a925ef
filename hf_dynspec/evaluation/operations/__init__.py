"""What a device is given to do, counted without one: operations, and the bytes and the arithmetic in them."""
