import warnings

# Saving and loading without a process group are plain cases here, not ones to warn of.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable")
