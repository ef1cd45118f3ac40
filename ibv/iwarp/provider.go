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

// These are the limits of the device. They were chosen freely, because only memory bounds a
// software device.
const (
	maxQPWR    = 1 << 14
	maxSGE     = 16
	maxInline  = 1 << 20
	maxCQE     = 1 << 20
	maxRdAtom  = 128 // maxRdAtom is that of Linux siw.
	maxMsgSize = 1<<31 - 1

	// An MPA frame carries 512 bytes of private data, of which revision 2 uses 4.
	maxPrivateData = iwarpwire.MaxPrivate - 4
)

// Config has the settings of the device. The zero value is ready for use.
type Config struct {
	// CRC requests CRC32C on every FPDU. It is used if either side requests it. The
	// default is false, as in Linux siw, because TCP has a checksum of its own, and
	// programs that need more use TLS.
	CRC bool

	// MaxFPDU bounds the ULPDU (headers and payload of one frame) on send, in bytes. 0
	// means 65535, the greatest value of the length field. Adapters that expect a frame to
	// fit into a TCP segment need less. A value below 128 is raised to 128.
	MaxFPDU int

	// ConnectTimeout bounds Connect (TCP and MPA set-up), and the time in which the
	// passive side must accept. 0 means 10 s.
	ConnectTimeout time.Duration

	// RequestTimeout bounds the time in which a connected peer must send its MPA request.
	// 0 means 5 s.
	RequestTimeout time.Duration

	// MaxHalfOpen bounds the connections of one listener whose request has not arrived
	// yet. If there is one more, the oldest is dropped. 0 means 1024.
	MaxHalfOpen int

	// SameHost says whether connections between two processes of this host use shared memory.
	// They do not by default.
	SameHost SameHost

	// portable restricts the device to calls that every system has. It makes no
	// non-blocking calls on the socket's descriptor. It is implied on systems without such
	// calls.
	portable bool
}

// Provider is the software device's connection manager. Use [New].
type Provider struct {
	dev *device
}

// New returns a provider with one device. It holds no resources by itself.
//
// New returns the concrete type, as rdmacore.New does. It returns no error, because values
// of Config that are out of range are moved to the nearest value that is allowed. So a call
// can be used as an argument.
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
	cfg.SameHost = cfg.SameHost.resolve()
	cfg.portable = cfg.portable || !haveRawIO
	d := &device{cfg: cfg, open: chooseLink(&cfg)}
	d.sweeper.Min, d.sweeper.Max = 2*time.Millisecond, 100*time.Millisecond
	return &Provider{dev: d}
}

// Name returns "iwarp".
func (p *Provider) Name() string { return Name }

// Attr reports that connections are TCP connections, and that UDP sockets are used for
// datagrams.
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
	meeting meeting
	qpn     atomic.Uint32
}

func (d *device) Name() string { return Name }

func (d *device) Attr() ibv.DeviceAttr {
	caps := ibv.CapSendInvalidate | ibv.CapLocalInvalidate | ibv.CapSolicited | ibv.CapQPRegion |
		ibv.CapOnDemandPaging | ibv.CapWaitReceives | ibv.CapTCPPorts
	if haveHeard && !d.cfg.portable {
		caps |= ibv.CapHoldSends
	}
	return ibv.DeviceAttr{
		Transport:       ibv.TransportIWARP,
		Caps:            caps,
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
		MaxPrivateData:  d.privateLimit(),
	}
}

// Port reports a port whose MTU is the payload of the largest frame, and which has a GID
// for each address of the machine.
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
