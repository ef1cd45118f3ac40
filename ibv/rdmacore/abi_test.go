package rdmacore

import (
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestABI compiles a file that compares the structures and numbers of shim.h
// with the headers of rdma-core: those that are installed, and the same as a later
// version may have them. Nothing is compiled into the test itself, so it builds
// without them.
func TestABI(t *testing.T) {
	cc := os.Getenv("CC")
	if cc == "" {
		cc = "cc"
	}
	args := append(strings.Fields(cc)[1:], "-std=gnu11", "-Wall", "-fsyntax-only")
	probe := exec.Command(strings.Fields(cc)[0], append(args, "-x", "c", "-")...)
	probe.Stdin = strings.NewReader("#include <infiniband/verbs.h>\n#include <rdma/rdma_cma.h>\n")
	if out, err := probe.CombinedOutput(); err != nil {
		if os.Getenv("RDMANET_REQUIRE_HEADERS") != "" {
			t.Fatalf("install libibverbs-dev and librdmacm-dev: %v\n%s", err, out)
		}
		t.Skip("no C compiler, or no headers to compare with: install libibverbs-dev and librdmacm-dev")
	}
	for name, more := range map[string][]string{
		"as installed": nil,
		"later":        {"-fms-extensions", "-include", "testdata/grown.h"},
	} {
		t.Run(name, func(t *testing.T) {
			out, err := exec.Command(strings.Fields(cc)[0], append(slices.Concat(args, more), "testdata/abi.c")...).CombinedOutput()
			require.NoError(t, err, "%s", out)
		})
	}
}
