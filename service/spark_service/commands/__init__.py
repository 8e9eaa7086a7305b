"""Commands of ``spark-service`` besides ``run`` and ``migrate``. Heavy imports happen inside them."""
