"""Loading models, counting their routing, and deciding which experts deserve video memory."""
