package rdmanet

import (
	"context"
	"net/http/httptrace"
	"net/netip"

	"github.com/rdmanet/rdmanet/ibv"
)

// traceConnect calls the hooks of net/http/httptrace that ctx may have for the beginning of
// an attempt to connect, and returns what calls those for its end. Package net does so for
// the software device, whose connections it makes.
func traceConnect(ctx context.Context, p ibv.Provider, n network, remote netip.AddrPort) (done func(error)) {
	trace := httptrace.ContextClientTrace(ctx)
	if trace == nil || isSoftware(p) {
		return func(error) {}
	}
	addr := remote.String()
	if trace.ConnectStart != nil {
		trace.ConnectStart(n.ports, addr)
	}
	return func(err error) {
		if trace.ConnectDone != nil {
			trace.ConnectDone(n.ports, addr, err)
		}
	}
}
