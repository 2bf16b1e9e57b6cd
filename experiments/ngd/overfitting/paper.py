"""What the paper says about the settings of Figs. 7 and 8, for their declarations."""

PAPER = {
    "data.num_train": "60000, not stated",
    "label_noise": "none",
    "model.hidden_sizes": "not stated",
    "seeds": "not stated",
    "training.num_epochs": "not stated",
    "optimizers.ngd.lr": 0.01,
    "optimizers.ngd.alpha": 0.1,
    "training.batch_size": 128,
    "trace.max_matvecs": 10000,
}
