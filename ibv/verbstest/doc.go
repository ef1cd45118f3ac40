// Package verbstest tests devices of package ibv and code that uses them.
//
// # Testing a device
//
// [TestProvider] is a conformance suite in the manner of
// golang.org/x/net/nettest: it checks that a provider keeps every rule that
// package ibv states. A device's own test calls it with a function that opens
// the provider:
//
//	func TestConformance(t *testing.T) {
//		verbstest.TestProvider(t, func(t *testing.T) verbstest.Env {
//			return verbstest.Env{
//				Passive: iwarp.New(iwarp.Config{}),
//				Addr:    netip.MustParseAddr("127.0.0.1"),
//			}
//		})
//	}
//
// The function is called for every subtest. It may return the same provider
// each time (one that drives the machine's hardware, say) or a new one, which
// it closes in t.Cleanup if that is needed. Addr is an address of the machine
// that the provider can listen on; for Soft-RoCE and siw it is that of the
// network interface behind the device, which is not always the loopback.
//
// What is optional is asked for in DeviceAttr.Caps: a device that lacks an
// operation is tested for refusing it. What a device is known to do wrong it says
// itself, in DeviceAttr.Quirks, and only that is let pass. Where InfiniBand and
// iWARP differ in what they can tell (a refused RDMA Write for instance), the suite
// goes by DeviceAttr.Transport. How long a thing takes is nowhere asserted, only
// that it happens: every wait gives up after [Patience].
//
// After each subtest every object must have been closed and every goroutine
// that it started must be gone, so the suite must not run in parallel with other
// tests. A single part is run by its name, that of the software device with, for
// instance,
//
//	go test -run 'TestProvider/Access/Write' ./ibv/verbstest
//
// # Testing the users of a device
//
// [Switch] stands between a provider and the code that uses it. It fails the
// call or the completion that it is told to and counts what is left open.
// [NewPair] connects two queue pairs for tests that need nothing more.
package verbstest
