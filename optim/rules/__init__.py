"""The rules: roles, parametrizations, and the multipliers that follow from them."""
