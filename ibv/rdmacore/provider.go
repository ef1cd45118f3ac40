package rdmacore

import (
	"fmt"
	"log/slog"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/printed"
)

// The method set of Provider is the same in every build.
var _ interface {
	ibv.Provider
	fmt.Formatter
	slog.LogValuer
	Unusable() error
} = (*Provider)(nil)

// Name returns "rdma".
func (p *Provider) Name() string { return Name }

// Attr returns the zero value, that of RDMA devices.
func (p *Provider) Attr() ibv.ProviderAttr { return ibv.ProviderAttr{} }

// String returns the provider's name.
func (p *Provider) String() string { return Name }

// Format prints String's text for every verb.
func (p *Provider) Format(s fmt.State, verb rune) { printed.Format(s, verb, p.String()) }

// LogValue logs String's text.
func (p *Provider) LogValue() slog.Value { return slog.StringValue(p.String()) }

// String lists the fields that are not zero.
func (c Config) String() string { return printed.Struct(c) }

// LogValue logs the fields that are not zero.
func (c Config) LogValue() slog.Value { return printed.LogStruct(c) }
