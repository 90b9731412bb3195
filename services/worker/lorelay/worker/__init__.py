"""Bus in, engine out: one engine, the adapters it holds, and what discovery says about it."""
