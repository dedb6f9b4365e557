"""Claims that numbers can refute, and the statistics behind them."""
