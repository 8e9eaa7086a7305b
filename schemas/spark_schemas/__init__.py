"""What crosses a process boundary in Spark: histograms, model shapes, profiles, manifests, errors."""
