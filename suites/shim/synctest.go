package shim

import (
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
)

// OutsideEnv is the environment variable with the names of the tests that SynctestTest runs
// outside of bubbles, separated by commas. Their subtests are included.
const OutsideEnv = "RDMANET_SUITES_OUTSIDE"

// SynctestTest stands for synctest.Test. Tests that connect to a server in a bubble run
// without one. In a bubble every goroutine must end with the test, but the goroutines of
// rdmanet's connections belong to the process.
func SynctestTest(t *testing.T, f func(*testing.T)) {
	test, _, _ := strings.Cut(t.Name(), "/")
	if slices.Contains(strings.Split(os.Getenv(OutsideEnv), ","), test) {
		f(t)
		return
	}
	synctest.Test(t, f)
}

// requireNoBubble panics in a bubble. A connection that is made there may work, or may end
// the bubble, or may end the process after the bubble has ended.
func requireNoBubble() {
	var buf [256]byte
	header, _, _ := strings.Cut(string(buf[:runtime.Stack(buf[:], false)]), "\n")
	if strings.Contains(header, "synctest bubble") {
		panic("shim: a connection in a bubble of testing/synctest: the test belongs to those that run outside")
	}
}
