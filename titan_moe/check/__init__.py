"""The contract test of a recipe: `titan-moe check recipes.NAME`, step by step in `steps.py`."""
