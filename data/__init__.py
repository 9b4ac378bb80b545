"""Facts as TOML, CSV and JSON, each value with its source; read by `importlib.resources.files('hybridlab.data')`."""
