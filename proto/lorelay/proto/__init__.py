"""The words of Lorelay: message structs, subjects, keys, error codes.  Pure data: no I/O, nothing of ours imported."""
