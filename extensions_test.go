package rdmanet

import (
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv/iwarp"
)

// Info names the extensions that two ends have agreed on, each from its own side.
func TestExtensions(t *testing.T) {
	type change func(e *Extensions)
	agreed := func(changes ...change) Extensions {
		e := Extensions{EarlyNegotiation: true, HalfClose: true, MessageFlags: true, SendTransfers: TransferRead, ReceiveTransfers: TransferRead}
		for _, c := range changes {
			c(&e)
		}
		return e
	}
	transfers := func(out, in TransferMode) change {
		return func(e *Extensions) { e.SendTransfers, e.ReceiveTransfers = out, in }
	}
	noEarly := func(e *Extensions) { e.EarlyNegotiation = false }
	target := func(e *Extensions) { e.ProbeTarget = true }
	soft := Config{Provider: iwarp.New(iwarp.Config{SameHost: iwarp.SameHostOff})}
	with := func(set func(c *Config, m *modest)) Config {
		m := newModest(t, 1<<20, 1<<14, false)
		m.Provider = soft.Provider
		c := Config{Provider: m}
		set(&c, m)
		return c
	}
	noRead := with(func(c *Config, m *modest) { c.NoRDMARead = true })
	noTransfers := with(func(c *Config, m *modest) { c.TransferSize = -1 })
	shy := with(func(c *Config, m *modest) { m.shy = true })
	garbled := with(func(c *Config, m *modest) { m.garble = true })
	held := agreed(transfers(TransferNone, TransferNone), func(e *Extensions) { e.HeldSends = true })
	if runtime.GOOS != "linux" {
		held = agreed()
	}
	for _, tt := range []struct {
		name          string
		listen, dial  Config
		server, other Extensions
	}{
		{"both with everything", soft, soft, held, held},
		{"one without transfers", soft, noTransfers, agreed(transfers(TransferNone, TransferNone)), agreed(transfers(TransferNone, TransferNone))},
		{"one with transfers", soft, Config{Provider: soft.Provider, TransferSize: 1 << 20}, agreed(), agreed()},
		{"the passive side wants no Reads", noRead, soft, agreed(transfers(TransferWrite, TransferWrite)), agreed(transfers(TransferWrite, TransferWrite))},
		{"the active side wants no Reads", soft, noRead, agreed(transfers(TransferWrite, TransferWrite)), agreed(transfers(TransferWrite, TransferWrite))},
		{"no transfers", noTransfers, noRead, agreed(transfers(TransferNone, TransferNone)), agreed(transfers(TransferNone, TransferNone))},
		{"the passive side may not send first", shy, soft, agreed(noEarly), agreed(noEarly)},
		{"the active side need not", soft, shy, agreed(), agreed()},
		{"the passive side's device garbles empty Reads", garbled, soft, agreed(), agreed(target)},
		{"the active side's device garbles empty Reads", soft, garbled, agreed(target), agreed()},
	} {
		t.Run(tt.name, func(t *testing.T) {
			checkLeaks(t)
			client, server := pipe(t, "rdma4", local4, &ListenConfig{Config: tt.listen}, &Dialer{Config: tt.dial})
			require.Equal(t, tt.server, server.Info().Extensions)
			require.Equal(t, tt.other, client.Info().Extensions)
			closeBoth(t, client, server)
		})
	}
}

// TestExtensionsOffered checks that an extension is agreed only if both sides have it and it is of use.
func TestExtensionsOffered(t *testing.T) {
	serves := func(features uint16) privateData {
		return privateData{ird: 4, ord: 4, rdmanet: true, features: features, maxReceive: 8136}
	}
	writesOnly := serves(featureFIN | featureTransfer)
	writesOnly.ird = 0 // its device serves no RDMA Reads, and can issue some
	for _, tt := range []struct {
		name string
		peer privateData
		want Extensions
	}{
		{"nothing", serves(0), Extensions{}},
		{"half-close", serves(featureFIN), Extensions{HalfClose: true}},
		{"message flags without half-close", serves(featureMessages), Extensions{}},
		{"message flags", serves(featureFIN | featureMessages), Extensions{HalfClose: true, MessageFlags: true}},
		{"transfers", serves(featureFIN | featureTransfer), Extensions{HalfClose: true, SendTransfers: TransferRead, ReceiveTransfers: TransferRead}},
		{"transfers without Reads", serves(featureFIN | featureTransfer | featureNoRead), Extensions{HalfClose: true, SendTransfers: TransferWrite, ReceiveTransfers: TransferWrite}},
		{"transfers, one way without Reads", writesOnly, Extensions{HalfClose: true, SendTransfers: TransferRead, ReceiveTransfers: TransferWrite}},
		{"no Reads of nobody", serves(featureFIN | featureNoRead), Extensions{HalfClose: true}},
		{"a probe target that is not there", serves(featureFIN | featureNoEmptyRead | featureProbeTarget), Extensions{HalfClose: true}},
		{"bits that nobody knows", serves(featureFIN | 1<<2 | 1<<15), Extensions{HalfClose: true}},
	} {
		for _, side := range sides {
			t.Run(tt.name+"/"+side.name, func(t *testing.T) {
				s := newScene(t)
				c, _ := s.conns(side.active, tt.peer.append(nil))
				want := tt.want
				if tt.peer.features&featureProbeTarget != 0 && !overIWARP(t) {
					// InfiniBand's connection manager pads private data with zeros, which are a target.
					want.ProbeTarget = true
				}
				require.Equal(t, want, c.Info().Extensions)
			})
		}
	}
}

func TestExtensionsString(t *testing.T) {
	for want, e := range map[string]Extensions{
		"none":                      {},
		"half-close":                {HalfClose: true},
		"large segments":            {LargeSegments: true},
		"held sends":                {HeldSends: true},
		"half-close, message flags": {HalfClose: true, MessageFlags: true},
		"transfers by RDMA Write":   {SendTransfers: TransferWrite, ReceiveTransfers: TransferWrite},
		"sends by RDMA Read":        {SendTransfers: TransferRead},
		"early negotiation, half-close, message flags, sends by RDMA Write, receives by RDMA Read, probe target": {
			EarlyNegotiation: true, HalfClose: true, MessageFlags: true, SendTransfers: TransferWrite, ReceiveTransfers: TransferRead, ProbeTarget: true,
		},
	} {
		require.Equal(t, want, e.String())
	}
	require.Equal(t, "unknown", TransferMode(9).String())
}
