package rdmanet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http/httptrace"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/iwarp"
	"github.com/rdmanet/rdmanet/ibv/verbstest"
)

// hooks notes the calls of the hooks of net/http/httptrace that are about connecting.
type hooks struct {
	mu    sync.Mutex
	calls []string
}

func (h *hooks) note(format string, args ...any) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.calls = append(h.calls, fmt.Sprintf(format, args...))
}

func (h *hooks) context() context.Context {
	return httptrace.WithClientTrace(tctx, &httptrace.ClientTrace{
		ConnectStart: func(network, addr string) { h.note("start %s %s", network, addr) },
		ConnectDone: func(network, addr string, err error) {
			h.note("done %s %s %v", network, addr, err != nil)
			if op := (*net.OpError)(nil); err != nil && !(errors.As(err, &op) && op.Op == "dial" && op.Addr.String() == addr) {
				h.note("%#v is no error of Dial", err)
			}
		},
	})
}

// once requires one attempt to reach an address.
func (h *hooks) once(t *testing.T, network, address string, failed bool) {
	t.Helper()
	h.mu.Lock()
	defer h.mu.Unlock()
	require.Equal(t, []string{"start " + network + " " + address, fmt.Sprintf("done %s %s %v", network, address, failed)}, h.calls)
}

// withoutSockets is a provider that is said to use no sockets of package net.
type withoutSockets struct{ ibv.Provider }

func (withoutSockets) Name() string           { return "other" }
func (withoutSockets) Attr() ibv.ProviderAttr { return ibv.ProviderAttr{} }

// A device whose connections package net does not make has the hooks called by Dial.
func TestDialTracedOnDevice(t *testing.T) {
	checkLeaks(t)
	for network, dial := range map[string]string{"tcp": "rdma", "udp": "udp"} {
		sw := newSwitch(t, iwarp.New(iwarp.Config{}))
		sw.FailNth(1, nil, verbstest.Resolve)
		var h hooks
		_, err := (&Dialer{Config: Config{Provider: withoutSockets{sw}}}).DialContext(h.context(), dial, "127.0.0.1:1")
		require.Error(t, err)
		h.once(t, network, "127.0.0.1:1", true)
		_, err = (&Dialer{Config: Config{Provider: withoutSockets{sw}}}).DialContext(httptrace.WithClientTrace(tctx, new(httptrace.ClientTrace)), dial, "127.0.0.1:1")
		require.Error(t, err)
	}
}

// The sockets of Go's resolver call no hooks, but those for the lookup are called.
func TestDialTracedLookup(t *testing.T) {
	checkLeaks(t)
	var h hooks
	ctx := httptrace.WithClientTrace(h.context(), &httptrace.ClientTrace{
		DNSStart: func(info httptrace.DNSStartInfo) { h.note("lookup of %s", info.Host) },
	})
	var asked atomic.Int32 // as often as the system's settings say
	resolver := &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		c, err := new(net.Dialer).DialContext(ctx, "udp", "127.0.0.1:1")
		if err == nil {
			c.Close()
			err = syscall.EHOSTDOWN
		}
		asked.Add(1)
		return nil, err
	}}
	_, err := (&Dialer{Resolver: resolver}).DialContext(ctx, "rdma", "nobody.invalid.:1")
	require.Error(t, err)
	require.Positive(t, asked.Load())
	h.mu.Lock()
	defer h.mu.Unlock()
	require.Equal(t, []string{"lookup of nobody.invalid."}, h.calls)
}

// Dial calls the hooks of net/http/httptrace as package net does, once an address.
func TestDialTraced(t *testing.T) {
	eachTransport(t, func(t *testing.T, tr transport) {
		ln, err := tr.listen(tr.network, tr.address)
		require.NoError(t, err)
		defer ln.Close()
		for address, refused := range map[string]bool{ln.Addr().String(): false, freePort(t, tr): true} {
			var h hooks
			dial := new(net.Dialer).DialContext
			if tr.rdma {
				dial = new(Dialer).DialContext
			}
			c, err := dial(h.context(), tr.network, address)
			require.Equal(t, refused, err != nil, "%v", err)
			if err == nil {
				c.Close()
			}
			network := "tcp" // the Dialer of this package names what the device says, not the family
			if !tr.rdma {
				network = tr.network
			}
			h.once(t, network, address, refused)
		}
	})
}
