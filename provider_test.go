package rdmanet

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/ibv/iwarp"
	"github.com/rdmanet/rdmanet/ibv/verbstest"
)

// standIn is a provider that can be told apart, and does nothing.
type standIn struct {
	ibv.Provider
	name string
	attr ibv.ProviderAttr
}

func (p standIn) Name() string           { return p.name }
func (p standIn) Attr() ibv.ProviderAttr { return p.attr }

// Without a configuration the devices that are present and can be opened are used, in the
// order of the list. A device that the configuration asks for must be there.
func TestProvidersInOrder(t *testing.T) {
	t.Setenv(deviceEnv, "")
	listed := preference
	defer func() { preference = listed }()
	sick := errors.New("the card is sick")
	for _, tt := range []struct {
		name    string
		present bool
		err     error // of opening an RDMA device
		cfg     Config
		env     string
		want    []string
		fails   string
		logged  bool
	}{
		{name: "both", present: true, want: []string{"rdma:", "iwarp"}},
		{name: "no RDMA device", want: []string{"iwarp"}},
		{name: "an RDMA device that fails", present: true, err: sick, want: []string{"iwarp"}, logged: true},
		{name: "RDMA required", cfg: Config{RequireRDMA: true}, want: []string{"rdma:"}},
		{name: "RDMA required and not to be had", present: true, err: sick, cfg: Config{RequireRDMA: true}, fails: "the card is sick"},
		{name: "any RDMA device", cfg: Config{Device: "rdma"}, want: []string{"rdma:"}},
		{name: "any RDMA device, required", cfg: Config{Device: "rdma", RequireRDMA: true}, want: []string{"rdma:"}},
		{name: "one RDMA device", cfg: Config{Device: "mlx5_1"}, want: []string{"rdma:mlx5_1"}},
		{name: "one RDMA device by the environment", cfg: Config{Device: "iwarp"}, env: "mlx5_1", want: []string{"rdma:mlx5_1"}},
		{name: "one RDMA device that fails", present: true, err: sick, cfg: Config{Device: "mlx5_1"},
			fails: `Config.Device is "mlx5_1" (the software device is "iwarp", any RDMA device "rdma"): the card is sick`},
		{name: "the software device", present: true, cfg: Config{Device: "iwarp"}, want: []string{"iwarp"}},
		{name: "the software device by the environment", present: true, cfg: Config{Device: "mlx5_1"}, env: "iwarp", want: []string{"iwarp"}},
		{name: "the software device is forbidden", present: true, cfg: Config{Device: "iwarp", RequireRDMA: true},
			fails: `Config.Device is "iwarp", the software device, which Config.RequireRDMA forbids`},
		{name: "the software device is forbidden and in the environment", cfg: Config{RequireRDMA: true}, env: "iwarp",
			fails: `RDMANET_DEVICE is "iwarp", the software device, which Config.RequireRDMA forbids`},
		{name: "a provider", present: true, cfg: Config{Provider: standIn{name: "given"}, RequireRDMA: true}, env: "iwarp", want: []string{"given"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Setenv(deviceEnv, tt.env)
			preference = append([]entry(nil), listed...)
			preference[0].present = func() bool { return tt.present }
			preference[0].open = func(_ *Config, device string) (ibv.Provider, error) { return standIn{name: "rdma:" + device}, tt.err }
			var log bytes.Buffer
			tt.cfg.Logger = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
			found, err := tt.cfg.providers()
			if tt.fails != "" {
				require.EqualError(t, err, tt.fails)
				if tt.err != nil {
					require.ErrorIs(t, err, tt.err)
				}
				return
			}
			require.NoError(t, err)
			var names []string
			for _, p := range found {
				names = append(names, p.Name())
			}
			require.Equal(t, tt.want, names)
			require.Equal(t, tt.logged, bytes.Contains(log.Bytes(), []byte(`msg="rdmanet: no RDMA device can be used" remote=<nil> err="the card is sick"`)), "%s", &log)
		})
	}
}

// An RDMA device that gets no answer gives way to the next try after rdmaPatience. The last
// try and the tries by sockets have no such bound.
func TestDialPatience(t *testing.T) {
	rdma := standIn{name: "rdma"}
	soft := standIn{name: "soft", attr: ibv.ProviderAttr{TCPSockets: true, UDPSockets: true}}
	one, two := netip.MustParseAddrPort("127.0.0.1:1"), netip.MustParseAddrPort("127.0.0.2:1")
	const silence = 10 * time.Second
	for _, ports := range []string{"tcp", "udp"} {
		for _, tt := range []struct {
			name      string
			providers []ibv.Provider
			remotes   []netip.AddrPort
			want      []time.Duration
		}{
			{"RDMA alone", []ibv.Provider{rdma}, []netip.AddrPort{one}, []time.Duration{silence}},
			{"RDMA first", []ibv.Provider{rdma, soft}, []netip.AddrPort{one}, []time.Duration{rdmaPatience, silence}},
			{"RDMA alone, two addresses", []ibv.Provider{rdma}, []netip.AddrPort{one, two}, []time.Duration{rdmaPatience, silence}},
			{"sockets alone, two addresses", []ibv.Provider{soft}, []netip.AddrPort{one, two}, []time.Duration{silence, silence}},
			{"RDMA first, two addresses", []ibv.Provider{rdma, soft}, []netip.AddrPort{one, two},
				[]time.Duration{rdmaPatience, silence, rdmaPatience, silence}},
		} {
			t.Run(ports+"/"+tt.name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					var took []time.Duration
					try := func(ctx context.Context, _ ibv.Provider, _, _ netip.AddrPort) (net.Conn, error) {
						ctx, cancel := context.WithTimeout(ctx, silence)
						defer cancel()
						start := time.Now()
						<-ctx.Done()
						took = append(took, time.Since(start))
						return nil, syscall.ETIMEDOUT
					}
					r := new(Dialer).inOrder(t.Context(), network{ports: ports, ip4: true}, tt.providers, netip.AddrPort{}, tt.remotes, try)
					require.Error(t, r.err)
					require.Equal(t, tt.want, took)
				})
			})
		}
	}
}

// otherPorts is a provider that says its ports are not TCP's.
type otherPorts struct{ ibv.Provider }

type otherPortsDevice struct{ ibv.Device }

func (p otherPorts) Devices() ([]ibv.Device, error) {
	devs, err := p.Provider.Devices()
	for i, d := range devs {
		devs[i] = otherPortsDevice{d}
	}
	return devs, err
}

func (d otherPortsDevice) Attr() ibv.DeviceAttr {
	a := d.Device.Attr()
	a.Caps &^= ibv.CapTCPPorts
	return a
}

// Providers listen on the same port. Where two take their ports from TCP's, the first one
// listens for both. Else another port is tried when one provider finds the port in use.
func TestListenSharedPort(t *testing.T) {
	checkLeaks(t)
	for _, tt := range []struct {
		name   string
		wrap   func(ibv.Provider) ibv.Provider
		shared bool
	}{
		{"both", func(p ibv.Provider) ibv.Provider { return p }, true},
		{"the second one", func(p ibv.Provider) ibv.Provider { return otherPorts{p} }, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			first, second := newSwitch(t, iwarp.New(iwarp.Config{})), newSwitch(t, iwarp.New(iwarp.Config{}))
			l := &listener{backlog: 1}
			err := l.bind(tctx, []ibv.Provider{tt.wrap(first), second}, netip.MustParseAddrPort("127.0.0.1:0"))
			if !tt.shared {
				require.ErrorIs(t, err, syscall.EADDRINUSE)
				require.Empty(t, l.listeners)
				require.EqualValues(t, portTries, second.Calls(verbstest.Listen))
				return
			}
			require.NoError(t, err)
			require.Len(t, l.listeners, 1)
			require.EqualValues(t, 1, second.Calls(verbstest.Listen))
			require.NoError(t, l.listeners[0].Close())
		})
	}
}
