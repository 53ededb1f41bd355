"""Building blocks of layers that communicate as little as possible."""
