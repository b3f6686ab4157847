"""Exports of the ledger and its costs, in the formats of finance and metering systems."""
