"""From a store back to tensors: read, check, rebuild, place. Reads only; what is written here are live tensors."""
