"""Tools for developers of the project; the wheel does not contain them."""
