"""The transports that can carry a dispatcher's rows: one file a backend, all behind `base.Backend`."""
