package rdmanet

import (
	"errors"
	"net"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/iwarp"
	"github.com/rdmanet/rdmanet/internal/iwarpwire"
	"github.com/rdmanet/rdmanet/internal/leaktest"
)

// The tests run over the software device or, where these variables name the
// addresses of an RDMA device, over that; RDMANET_DEVICE must then say so, too.
var (
	onRDMA = os.Getenv("RDMANET_VM_ADDR") != ""
	host4  = hostFrom("RDMANET_VM_ADDR", "127.0.0.1")
	host6  = hostFrom("RDMANET_VM_ADDR6", "::1")
	local4 = net.JoinHostPort(host4, "0")
	local6 = net.JoinHostPort(host6, "0")
)

// BenchPeerEnv makes the test binary serve as the far end of a benchmark.
const BenchPeerEnv = "RDMANET_BENCH_PEER"

// TestMain fails, too, when the tests leave resources of the device behind.
func TestMain(m *testing.M) {
	device := ""
	if onRDMA {
		rdmaProvider("") // whose goroutines and descriptors stay for good: no test leaves them
		if os.Getenv(victimEnv) == "" && os.Getenv(BenchPeerEnv) == "" {
			device = os.Getenv("RDMANET_VM_DEVICE")
		}
	}
	os.Exit(leaktest.Main(m, device, host4, func() (ibv.Provider, error) { return rdmaProvider("") }))
}

func hostFrom(env, otherwise string) string {
	if host := os.Getenv(env); host != "" {
		return host
	}
	return otherwise
}

// heavy is a size, or a number of repetitions, that is there for volume only: a
// part of it over RDMA devices, which are emulated where these tests run.
func heavy(n int) int {
	if onRDMA {
		return max(1, n/8)
	}
	return n
}

// repeats is a number of repetitions of the same with other random numbers: a quarter of them
// with -short, and fewer over RDMA devices. Unlike heavy it is for no size.
func repeats(n int) int {
	if testing.Short() {
		n = max(1, n/4)
	}
	return heavy(n)
}

// newProvider returns the provider of the device that the tests run over.
func newProvider(t testing.TB) ibv.Provider {
	t.Helper()
	if !onRDMA {
		return iwarp.New(iwarp.Config{})
	}
	p, err := rdmaProvider("")
	require.NoError(t, err)
	return p
}

// overTCP returns the software device without shared memory, for tests that have something
// between the two ends.
func overTCP() ibv.Provider { return iwarp.New(iwarp.Config{SameHost: iwarp.SameHostOff}) }

// testDevice is that device.
func testDevice(t testing.TB) ibv.Device {
	t.Helper()
	devs, err := newProvider(t).Devices()
	require.NoError(t, err)
	return devs[0]
}

func deviceName(t testing.TB) string {
	t.Helper()
	return testDevice(t).Name()
}

// overIWARP reports whether it speaks iWARP, so that its connections are TCP's.
func overIWARP(t testing.TB) bool {
	t.Helper()
	return testDevice(t).Attr().Transport == ibv.TransportIWARP
}

// negotiatesEarly reports whether its passive side may send first, without which
// there is no early negotiation. Soft-iWARP does not tell, so it may not.
func negotiatesEarly(t testing.TB) bool {
	t.Helper()
	return !onRDMA || !overIWARP(t)
}

// errTooLong stands for how a receive ends for which the message is too long.
var errTooLong = errors.New("too long for the receive")

// errUngranted stands for how a message ends that the peer had no credit for: the device has no
// receive for it, or has one that the peer was not granted yet.
var errUngranted = errors.New("sent without a credit, whether there is a receive or not")

// requireCause is require.ErrorIs for any device.
func requireCause(t testing.TB, err, want error) {
	t.Helper()
	switch {
	case want == errUngranted:
		require.True(t, errors.Is(err, errNoCredit) || errors.Is(err, iwarpwire.ErrNoBuffer), "%v", err)
	case want != errTooLong:
		require.ErrorIs(t, err, want)
	case !errors.Is(err, ibv.WCLocQPOpErr) || !testDevice(t).Attr().Quirks.VagueErrors:
		require.ErrorIs(t, err, ibv.WCLocLenErr)
	}
}

// sharedDomain reports whether the connections of the device share their memory.
func sharedDomain(t testing.TB) bool {
	return testDevice(t).Attr().Caps.Has(ibv.CapQPRegion)
}
