//go:build linux && cgo

package rdmacore

import (
	"os"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestParseCCall(t *testing.T) {
	for mode, want := range map[string][2]bool{"": {false, true}, "auto": {false, true}, "on": {true, true}, "off": {false, false}} {
		all, some, err := parseCCall(mode)
		require.NoError(t, err)
		require.Equal(t, want, [2]bool{all, some}, mode)
	}
	t.Setenv(ccallEnv, "yes")
	_, err := New(Config{})
	require.ErrorContains(t, err, `RDMANET_CCALL="yes": must be auto, on or off`)
}

// Only drivers that are in the list go around cgo, whatever their library is called in a
// version or a distribution.
func TestDriversThatStayOut(t *testing.T) {
	for file, want := range map[string]bool{
		"libmlx5-rdmav34.so":         true,
		"libmlx5.so.1":               true,
		"libmlx5.so.1.25.50.0":       true,
		"liberdma-rdmav57.so":        true,
		"libefa.so.1":                true,
		"libvmw_pvrdma-rdmav34.so":   true,
		"librxe-rdmav34.so":          false,
		"libsiw-rdmav34.so":          false,
		"libirdma-rdmav34.so":        false,
		"libhns-rdmav34.so":          false,
		"libbnxt_re-rdmav34.so":      false,
		"libmlx4.so.1":               false,
		"libibverbs.so.1":            false, // which makes calls of the kernel for drivers that have none
		"libmlx5-rdmav34.so.wrapped": false,
		"notlibmlx5.so":              false,
		"":                           false,
	} {
		require.Equal(t, want, staysOut.MatchString(file), file)
	}
}

// The driver of a device is found, and the two software devices, which post in the kernel,
// are called by cgo unless the environment says otherwise.
func TestDriverFound(t *testing.T) {
	name := os.Getenv("RDMANET_VM_DEVICE")
	if name == "" {
		t.Skip("needs a device of rdma-core: see vm/README.md")
	}
	p, err := New(Config{Device: name})
	require.NoError(t, err)
	devs, err := p.Devices()
	require.NoError(t, err)
	d := devs[0].(*device)
	require.Regexp(t, "^lib"+strings.TrimRight(name, "0123456789")+"-rdmav[0-9]+\\.so$", d.driver())
	require.Equal(t, os.Getenv(ccallEnv) == "on", d.direct)
	for mode, want := range map[string]bool{"": false, "off": false, "on": true} {
		t.Setenv(ccallEnv, mode)
		require.Equal(t, want, d.callsDirectly(), mode)
	}
}
