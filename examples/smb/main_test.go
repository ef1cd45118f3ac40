package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// What is missing from the command line is said before any device is looked for.
func TestCommandsMissServer(t *testing.T) {
	require.ErrorContains(t, checkCommand(nil), "-addr")
	require.ErrorContains(t, relayCommand(nil), "-to")
}
