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
// The function is called for every subtest. It may return the same provider each time, for
// instance one for the machine's hardware. Or it may return a new one, and close that in
// t.Cleanup. Addr is an address of the machine that the provider can listen on. For
// Soft-RoCE and siw it is that of the network interface of the device, which is not always
// the loopback interface.
//
// Optional operations are those in DeviceAttr.Caps. If a device lacks one, the suite tests
// that it refuses it. A device lists the rules that it is known to break in
// DeviceAttr.Quirks, and the suite allows only these. Where InfiniBand and iWARP report
// differently (a refused RDMA Write for instance), DeviceAttr.Transport decides. The suite
// never checks how long something takes, only that it happens. Every wait ends after
// [Patience].
//
// After each subtest every object must be closed, and every goroutine that the subtest has
// started must have ended. So the suite must not run in parallel with other tests. A single
// part is run by its name. For the software device that is, for instance,
//
//	go test -run 'TestProvider/Access/Write' ./ibv/verbstest
//
// # Testing the users of a device
//
// [Switch] is a provider between a provider and the code that uses it. It fails the call or
// the completion that a test names, and counts the objects that are left open. [NewPair]
// connects two queue pairs for tests that need nothing more.
package verbstest
