"""`bert-export calibrate`: fits calibrated scores and thresholds on labeled data. It needs no torch. Int8 calibration is in `int8/`."""
