"""`lh.preflight`: changes one thing of a model's input or inside at a time, and says what moved that must not."""
