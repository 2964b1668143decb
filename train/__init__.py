"""Training of OT-Transformers: models, ODE integration, objective, data, recipes, evaluation.

Knows torch and nothing of export or serving.
"""
