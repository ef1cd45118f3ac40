package rdmanet

import (
	"context"
	"net/http/httptrace"
	"net/netip"

	"github.com/rdmanet/rdmanet/ibv"
)

// traceConnect calls the hooks of net/http/httptrace that ctx may have for the beginning of
// an attempt to connect, and returns what calls those for its end. Package net does so itself
// where the provider uses its sockets.
func traceConnect(ctx context.Context, p ibv.Provider, n network, remote netip.AddrPort) (done func(error)) {
	trace := httptrace.ContextClientTrace(ctx)
	if trace == nil || n.hasSockets(p) {
		return func(error) {}
	}
	addr := remote.String()
	if trace.ConnectStart != nil {
		trace.ConnectStart(n.ports, addr)
	}
	return func(err error) {
		if trace.ConnectDone != nil {
			if err != nil {
				err = opError("dial", nil, n.addr(remote), dialError(err))
			}
			trace.ConnectDone(n.ports, addr, err)
		}
	}
}

// traceLookup returns a context for looking up a name. Of the hooks that ctx may have it
// has those for that only: the sockets by which Go's resolver asks its servers are no
// attempts to connect, for package net neither.
func traceLookup(ctx context.Context) context.Context {
	trace := httptrace.ContextClientTrace(ctx)
	if trace == nil {
		return ctx
	}
	lookup := &httptrace.ClientTrace{DNSStart: trace.DNSStart, DNSDone: trace.DNSDone}
	if lookup.DNSStart == nil { // Without any hook those of ctx would stay.
		lookup.DNSStart = func(httptrace.DNSStartInfo) {}
	}
	return httptrace.WithClientTrace(untraced{ctx}, lookup)
}

// untraced is a context without the hooks of net/http/httptrace, which would be added to
// those that are set for it.
type untraced struct{ context.Context }

func (c untraced) Value(key any) any {
	v := c.Context.Value(key)
	if _, ok := v.(*httptrace.ClientTrace); ok {
		return nil
	}
	return v
}
