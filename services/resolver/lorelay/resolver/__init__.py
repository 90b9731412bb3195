"""Bus in, disk out: an opaque source becomes a verified snapshot in the cache of its domain."""
