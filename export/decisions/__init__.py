"""`bert-export calibrate`: fits calibrated scores and thresholds on labeled data. It needs no torch."""
