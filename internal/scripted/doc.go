// Package scripted wraps a provider of verbs for tests. It shows what a program does with
// the verbs of each connection, and steers what the device does and when.
//
// A test finds the [Endpoint] of a connection by the number of its queue pair, which the
// connection's Info tells. The endpoint says whether somebody sleeps in [ibv.CQ.Wait], what
// the completion queue was armed for, who polled it last, and how many sends are posted and
// not known to be completed. It holds completions back, makes posts wait, fails them, and
// runs functions of the test at chosen calls. [verbstest.Switch] counts calls and objects
// and fails calls by their number; the two can be stacked.
//
// [verbstest.Switch]: https://pkg.go.dev/github.com/rdmanet/rdmanet/ibv/verbstest#Switch
package scripted
