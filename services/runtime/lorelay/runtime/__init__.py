"""What every service stands on: bus, store, discovery, settings, logs, telemetry."""
