// Package scripted wraps a provider of verbs for tests. It shows how a program uses the
// verbs of each connection, and controls what the device does and when.
//
// A test finds the [Endpoint] of a connection by the number of its queue pair, which is in
// the connection's Info. The endpoint reports whether a goroutine sleeps in [ibv.CQ.Wait],
// what the completion queue was armed for, which goroutine polled it last, and how many
// sends are posted whose completion the program does not know. It holds completions back,
// makes posts wait, fails them, and calls functions of the test at chosen calls.
// [verbstest.Switch] counts calls and objects, and fails calls by their number. The two can
// be combined.
//
// [verbstest.Switch]: https://pkg.go.dev/github.com/rdmanet/rdmanet/ibv/verbstest#Switch
package scripted
