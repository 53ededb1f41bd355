"""Building blocks of layers: what they communicate, and how little."""
