package iwarp

import (
	"net"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/iwarpwire"
	"github.com/rdmanet/rdmanet/internal/vacancy"
)

// Name is the name of the provider and of its only device.
const Name = "iwarp"

// Limits of the device. They are chosen, not found: nothing but memory bounds
// a device made of software.
const (
	maxQPWR    = 1 << 14
	maxSGE     = 16
	maxInline  = 1 << 20
	maxCQE     = 1 << 20
	maxRdAtom  = 128 // as Linux siw
	maxMsgSize = 1<<31 - 1

	// An MPA frame carries 512 bytes, of which revision 2 takes 4.
	maxPrivateData = iwarpwire.MaxPrivate - 4
)

// Config adjusts the device. The zero value serves well.
type Config struct {
	// CRC asks the peer for CRC32C on every FPDU; it is used when either side
	// asks. Off by default, as in Linux siw: TCP has a checksum of its own and
	// whoever needs more has TLS.
	CRC bool

	// MaxFPDU bounds the ULPDU (headers and payload of one frame) on send, in
	// bytes. 0 means 65535, all that the length field can say; adapters that
	// expect a frame to fit a TCP segment need less. Below 128 it is raised to
	// 128.
	MaxFPDU int

	// ConnectTimeout bounds Connect (TCP and MPA set-up) and the time the
	// passive side may take to accept; 0 means 10 s.
	ConnectTimeout time.Duration

	// RequestTimeout bounds how long a connected peer may take to send its MPA
	// request; 0 means 5 s.
	RequestTimeout time.Duration

	// MaxHalfOpen bounds the connections of one listener whose request has not
	// arrived yet; the oldest is dropped for a new one. 0 means 1024.
	MaxHalfOpen int

	// portable keeps to what every system has: no non-blocking calls on the
	// socket's descriptor. It is implied where the system lacks them.
	portable bool
}

// Provider is the software device's connection manager. Use [New].
type Provider struct {
	dev *device
}

// New returns a provider with one device. It holds no resources by itself.
//
// New returns the concrete type, as rdmacore.New does. There is no error to return, because
// values of Config that are out of range are moved to the nearest one allowed; so the call
// can stand where a provider is wanted.
func New(cfg Config) *Provider {
	if cfg.MaxFPDU <= 0 || cfg.MaxFPDU > iwarpwire.MaxULPDU {
		cfg.MaxFPDU = iwarpwire.MaxULPDU
	}
	cfg.MaxFPDU = max(cfg.MaxFPDU, 128)
	if cfg.ConnectTimeout <= 0 {
		cfg.ConnectTimeout = 10 * time.Second
	}
	if cfg.RequestTimeout <= 0 {
		cfg.RequestTimeout = 5 * time.Second
	}
	if cfg.MaxHalfOpen <= 0 {
		cfg.MaxHalfOpen = 1024
	}
	cfg.portable = cfg.portable || !haveRawIO
	d := &device{cfg: cfg, open: chooseLink(&cfg)}
	d.sweeper.Min, d.sweeper.Max = 2*time.Millisecond, 100*time.Millisecond
	return &Provider{dev: d}
}

// Name returns "iwarp".
func (p *Provider) Name() string { return Name }

// Attr says that connections are TCP's, and that UDP sockets serve for datagrams.
func (p *Provider) Attr() ibv.ProviderAttr {
	return ibv.ProviderAttr{TCPSockets: true, UDPSockets: true}
}

// Devices returns the one device.
func (p *Provider) Devices() ([]ibv.Device, error) { return []ibv.Device{p.dev}, nil }

// device implements ibv.Device.
type device struct {
	cfg     Config
	open    opener
	sweeper vacancy.Sweeper
	qpn     atomic.Uint32
}

func (d *device) Name() string { return Name }

func (d *device) Attr() ibv.DeviceAttr {
	return ibv.DeviceAttr{
		Transport: ibv.TransportIWARP,
		Caps: ibv.CapSendInvalidate | ibv.CapLocalInvalidate | ibv.CapSolicited | ibv.CapQPRegion |
			ibv.CapOnDemandPaging | ibv.CapWaitReceives | ibv.CapTCPPorts,
		Ports:           1,
		MaxQP:           1 << 20,
		MaxQPWR:         maxQPWR,
		MaxSGE:          maxSGE,
		MaxSGERead:      1,
		MaxInline:       maxInline,
		MaxCQ:           1 << 20,
		MaxCQE:          maxCQE,
		MaxMR:           1 << 24,
		MaxPD:           1 << 20,
		MaxMRSize:       1 << 46,
		MaxMessageSize:  maxMsgSize,
		MaxQPRdAtom:     maxRdAtom,
		MaxQPInitRdAtom: maxRdAtom,
		MaxPrivateData:  maxPrivateData,
	}
}

// Port reports the payload of the largest frame as the MTU, and a GID for each
// address of the machine.
func (d *device) Port(n int) (ibv.PortAttr, error) {
	if n != 1 {
		return ibv.PortAttr{}, &net.AddrError{Err: "no such port of the device", Addr: Name}
	}
	a := ibv.PortAttr{State: ibv.PortActive, ActiveMTU: d.cfg.MaxFPDU - iwarpwire.UntaggedLen}
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return a, err
	}
	for _, ia := range addrs {
		if ipn, ok := ia.(*net.IPNet); ok {
			if ip, ok := netip.AddrFromSlice(ipn.IP); ok {
				a.GIDs = append(a.GIDs, ibv.GIDFromAddr(ip))
			}
		}
	}
	return a, nil
}
