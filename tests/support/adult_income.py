"""The Adult example: two small files as UCI's, and what its training must reach."""

import os

if "PERSIA_DATA_DIR" in os.environ:
    DATA = {"PERSIA_DATA_DIR": os.environ["PERSIA_DATA_DIR"]}
    LEAST_AUC, NUM_WARNINGS = 0.892, 0
else:  # made-up rows, as those of test_persia_launcher_job.py
    DATA = dict.fromkeys(["HTTP_PROXY", "HTTPS_PROXY"], "http://127.0.0.1:9")
    LEAST_AUC, NUM_WARNINGS = 0.85, 2
LEAST_STALE_AUC = LEAST_AUC - 0.003  # five standard deviations: no order of updates

TRAIN = [
    "39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, "
    "Not-in-family, White, Male, 2174, 0, 40, United-States, <=50K",
    "52, ?, 209642, HS-grad, 9, Married-civ-spouse, ?, "
    "Husband, White, Male, 0, 1902, 45, Cuba, >50K",
]
TEST = [
    "25, Private, 226802, 11th, 7, Never-married, Machine-op-inspct, "
    "Own-child, Black, Male, 0, 0, 40, United-States, <=50K.",
    "28, State-gov, 336951, Bachelors, 13, Married-civ-spouse, Adm-clerical, "
    "Wife, White, Female, 7688, 0, 16, ?, >50K.",
]


def write(folder, *, train=TRAIN, test=TEST, ending="\n"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adult.data").write_bytes("\n".join(train).encode() + ending.encode())
    (folder / "adult.test").write_bytes("\n".join(test).encode() + ending.encode())
    return folder
