"""The commands, one module a noun or verb. Heavy imports happen inside them, so that ``--help`` stays quick."""
