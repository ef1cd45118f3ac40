package main

import (
	"testing"

	"github.com/stretchr/testify/require"
)

// Missing arguments are reported before a device is looked for.
func TestCommandsMissServer(t *testing.T) {
	require.ErrorContains(t, checkCommand(nil), "-addr")
	require.ErrorContains(t, relayCommand(nil), "-to")
}
