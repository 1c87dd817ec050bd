"""From a run to findings: the rules, their thresholds and their wording; two runs compared.

Nothing here sees a model or imports torch.
"""
