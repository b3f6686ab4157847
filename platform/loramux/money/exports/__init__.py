"""Exports of the ledger and its costs, in the formats that finance and metering systems take."""
